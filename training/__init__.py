"""Training of the shipped weights; nothing else imports it."""
