"""POST /tokenize and /detokenize."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from ....core.errors import InvalidRequest
from ...dialects.openai.bodies import DetokenizeRequest, TokenizeRequest
from ...dialects.openai.reading import tokenized_chat
from ...serving.decoding import decoder
from ...serving.dialect import READS, Endpoints, post
from ...serving.errors import JsonResponse
from . import protocol

decode_tokenize = decoder(TokenizeRequest)
decode_detokenize = decoder(DetokenizeRequest)


class TokenRoutes(Endpoints):
    """Tokenize and detokenize texts."""

    @post("/tokenize", protocol.Tokens, body=TokenizeRequest, errors=READS)
    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a prompt or of messages."""
        body = await self.service.read(request, decode_tokenize)
        self.service.check_model(body.model)
        async with self.service.wanted(request.receive):
            token_ids = await self._token_ids(body)
        names = None
        if body.return_token_strs:
            tokenizer = self.service.llm.tokenizer
            names = [tokenizer.token_bytes(i).decode("utf-8", "replace") for i in token_ids]
        most = self.service.llm.built.max_model_len
        return JsonResponse(
            protocol.Tokens(
                count=len(token_ids), max_model_len=most, tokens=token_ids, token_strs=names
            )
        )

    async def _token_ids(self, body: TokenizeRequest) -> list[int]:
        llm = self.service.llm
        if body.messages is not None and body.prompt is None:
            chat = await self.service.apart(partial(tokenized_chat, body, body.messages))
            return [*(await self.service.chat.render(chat)).token_ids]
        if body.prompt is None or body.messages is not None:
            raise InvalidRequest(
                "the body needs either prompt or messages, but not both", param="prompt"
            )
        return await llm.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)

    @post("/detokenize", protocol.Detokenized, body=DetokenizeRequest, errors=READS)
    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids, special tokens included."""
        body = await self.service.read(request, decode_detokenize)
        self.service.check_model(body.model)
        llm = self.service.llm
        llm.tokenizer.check_ids(body.tokens, llm.built.vocab_size, "tokens")
        text = llm.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return JsonResponse(protocol.Detokenized(prompt=text))
