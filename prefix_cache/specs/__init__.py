"""Specs of the state that layers cache, grouped into a config. Imports no other room."""
