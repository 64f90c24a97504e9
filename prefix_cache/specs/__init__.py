"""What layers keep: specs of cached state, grouped into a config. Imports no other room."""
