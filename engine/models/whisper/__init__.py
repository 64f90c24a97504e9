"""Whisper: an encoder-decoder that reads sound. Imports seq2seq and the rooms below it."""
