"""HTTP server. Imports its subpackages serving and openai, and everything they import.

Requires the extra ``serve``. Only the command that starts the server imports it.
"""
