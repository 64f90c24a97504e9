"""Decoder-only families of attention layers. Imports interfaces of engine.models, and layers."""
