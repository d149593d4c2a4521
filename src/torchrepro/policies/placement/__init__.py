"""Parts of a model that run on another device."""
