"""The built-in tokenizer of models with random weights: one token a byte, and four special tokens."""

from tokenspeed.frontend.tokenizer import TokenizerError, without_doubled_begin

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
FIRST_SPECIAL = 256
SMALLEST_VOCABULARY = FIRST_SPECIAL + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>"
    "\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 to 259 the special tokens.

    A model's vocabulary may be larger: the ids beyond are no text, and a model with random weights draws them all the
    time; they are shown as ``⟨id⟩`` so that a stream has something to see.
    """

    def __init__(self, vocab_size: int = SMALLEST_VOCABULARY) -> None:
        """Raises TokenizerError where the vocabulary cannot hold the bytes and the special tokens."""
        if vocab_size < SMALLEST_VOCABULARY:
            raise TokenizerError(
                f"a random model's vocab_size is {vocab_size}; the byte tokenizer needs at least {SMALLEST_VOCABULARY}"
            )
        self._vocab_size = vocab_size
        self._ids = {name: FIRST_SPECIAL + at for at, name in enumerate(SPECIAL_TOKENS)}
        self.bos_token, self.eos_token = SPECIAL_TOKENS[:2]
        self.bos_token_id: int | None = FIRST_SPECIAL
        self.special_ids = frozenset(self._ids.values())

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = [FIRST_SPECIAL] if add_special_tokens else []
        while text:
            found = [(text.index(name), name) for name in SPECIAL_TOKENS if name in text]
            at, name = min(found, default=(len(text), ""))
            ids.extend(text[:at].encode())
            if name:
                ids.append(self._ids[name])
            text = text[at + len(name) :]
        return without_doubled_begin(ids, FIRST_SPECIAL)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,)) if 0 <= token_id < FIRST_SPECIAL else self.token_name(token_id).encode()

    def token_name(self, token_id: int) -> str:
        if 0 <= token_id < FIRST_SPECIAL:
            return f"<0x{token_id:02X}>"
        if token_id < SMALLEST_VOCABULARY:
            return SPECIAL_TOKENS[token_id - FIRST_SPECIAL] if token_id >= 0 else ""
        return f"⟨{token_id}⟩" if token_id < self._vocab_size else ""
