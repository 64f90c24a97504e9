"""CSM: a backbone that generates codes of several codebooks, and its codec. Imports decoders."""
