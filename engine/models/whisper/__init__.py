"""Whisper: an encoder-decoder with audio input. Imports seq2seq and the packages below it."""
