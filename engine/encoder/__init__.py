"""The engine of encoder stages: an input, one pass. Imports models, inputs and the rooms below."""
