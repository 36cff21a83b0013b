"""Reusable stages of compression; each has a kind (see ``base``) and a law."""
