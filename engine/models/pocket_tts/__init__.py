"""Pocket TTS: speech as continuous latents. Imports decoders, and the checks of another codec."""
