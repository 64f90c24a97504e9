"""Voxtral: a decoder with audio input. Imports other families, and the packages below them."""
