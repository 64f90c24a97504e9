"""Which tokens run next, which requests hold which blocks. Imports requests and below; no model."""
