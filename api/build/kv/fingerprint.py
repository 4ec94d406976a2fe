"""ModelDigests: the fingerprint of a loaded model's KV; see core/tiers/fingerprint.py.

Imported only if a tier or a transfer needs it.
"""

from __future__ import annotations

from ....core.config import EngineConfig, Sizes
from ....core.interface.kv_codec import KV_CODECS
from ....core.model.decoder import Decoder
from ....core.model.images.vision import Vision
from ....core.ops.machine.identity import machine_identity
from ....core.tiers.fingerprint import (
    CODE,
    HEAD_CODE,
    FingerprintParts,
    HeadParts,
    WeightsDigest,
    code_digest,
    kernels_name,
    kv_fingerprint,
)
from ....draft.heads.joined import JoinedHead


class ModelDigests:
    """Digests of the weights of a target and its draft head.

    ``target`` and ``head`` are passed to the loaders as their ``on_read`` callbacks.
    """

    def __init__(self) -> None:
        self.target = WeightsDigest()
        self.head = WeightsDigest()

    def kernels(self, target: Decoder) -> str:
        """Return an identifier of the kernels. Engines with equal identifiers run the same kernels.

        Must be called in the same thread as `fingerprint`.
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

        ``head``: the draft head whose KV is stored with the target's KV. ``vision``: the image
        tower. Must be called in a thread that computes with as many threads as the model.
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
