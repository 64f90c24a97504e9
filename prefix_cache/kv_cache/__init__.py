"""KV-cache manager, the interface to the engine, and its helpers. Imports all other rooms here."""
