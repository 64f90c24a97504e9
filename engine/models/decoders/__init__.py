"""Decoder-only families of attention layers. Imports the contracts in engine.models, and layers."""
