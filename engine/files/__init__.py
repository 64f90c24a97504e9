"""Disk caches, and readers of untrusted files. Imports interface only."""
