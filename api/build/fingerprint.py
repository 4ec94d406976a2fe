"""ModelDigests: the fingerprint of a loaded model's KV, see core/tiers/fingerprint.py.

Imported only where a tier is asked for: without one, nothing is digested.
"""

from __future__ import annotations

from ...core.config import EngineConfig, Sizes
from ...core.interface.kv_codec import KV_CODECS
from ...core.model.decoder import Decoder
from ...core.model.images.vision import Vision
from ...core.ops.machine.identity import machine_identity
from ...core.tiers.fingerprint import (
    CODE,
    HEAD_CODE,
    FingerprintParts,
    HeadParts,
    WeightsDigest,
    code_digest,
    kernels_name,
    kv_fingerprint,
)
from ...draft.heads.joined import JoinedHead


class ModelDigests:
    """Digests of a target and of its head; each is the ``on_read`` of what loads it."""

    def __init__(self) -> None:
        self.target = WeightsDigest()
        self.head = WeightsDigest()

    def kernels(self, target: Decoder) -> str:
        """Name what computes, besides weights and options: equal only where all of it is equal.

        Called in the same thread as `fingerprint`.
        """
        machine, code = machine_identity(target.device), code_digest(CODE)
        return kernels_name(target.identity, machine, code)

    def fingerprint(
        self,
        target: Decoder,
        head: JoinedHead | None,
        vision: Vision | None,
        config: EngineConfig,
        sizes: Sizes,
    ) -> bytes:
        """Return the fingerprint of a target that was loaded with these options.

        ``head``: the one whose KV is stored beside the target's. ``vision``: what makes rows of
        prompts from images. Called in a thread that has the number of threads with which the model
        computes.
        """
        return kv_fingerprint(
            FingerprintParts(
                weights=self.target.digest(),
                config=repr(target.config),
                decoder=dict(target.identity),
                machine=machine_identity(target.device),
                code=code_digest(CODE if head is None else (*CODE, *HEAD_CODE)),
                dtype=str(target.dtype),
                asked_dtype=config.dtype,
                quantize=config.quantize,
                exact=config.exact,
                load_format=config.load_format,
                page_size=sizes.page_size,
                kv_codec=repr(KV_CODECS[config.kv_cache_dtype]),
                head=None
                if head is None
                else HeadParts(weights=self.head.digest(), config=repr(head.config)),
                tower=None if vision is None else vision.identity,
            )
        )
