"""Requests and answers in OpenAI's shapes. Imports serving, and all that serving imports."""
