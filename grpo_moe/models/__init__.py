"""Native policy models."""
