"""LLaVA: a decoder that sees pictures. Imports decoders and the rooms below it."""
