"""From logits to token ids: penalties, masks, seeded draws. Imports interface, native
and resources."""
