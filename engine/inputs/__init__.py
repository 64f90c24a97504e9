"""From a prompt to a request; knows no model. Imports requests and the rooms below it."""
