"""Bridges between transformers models and our ops."""
