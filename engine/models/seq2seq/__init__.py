"""BART and T5: encoder-decoders for text. Imports engine.models and the packages below it."""
