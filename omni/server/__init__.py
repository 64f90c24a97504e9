"""The HTTP server. Imports its rooms serving and openai, and all that these import.

It needs the extra ``serve``. The command that starts it imports it, and nothing else does.
"""
