"""Conversion of prompts to requests; knows no model. Imports requests and the rooms below it."""
