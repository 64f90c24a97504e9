"""The manager that an engine talks to, and its helpers. Imports every other room of the cache."""
