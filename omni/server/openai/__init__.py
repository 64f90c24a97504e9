"""Requests and responses in OpenAI's schema. Imports serving, and all that serving imports."""
