"""Voxtral: a decoder that hears. Imports rooms of other families, and those below them."""
