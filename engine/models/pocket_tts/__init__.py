"""Pocket TTS: speech in continuous latents. Imports decoders, and the checks of another codec."""
