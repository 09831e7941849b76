"""OpenAI's Responses: /v1/responses, and the store of earlier ones."""
