"""CSM: a backbone that draws codes of several codebooks, and its codec. Imports decoders."""
