"""SGLang's own door: /generate."""
