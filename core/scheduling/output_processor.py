"""Output processing: append a step's tokens to a request, up to the first terminal event.

Accepted tokens after that event are discarded before ``num_computed`` and the delta are set. So
ids, log-probabilities, text and counts agree.
"""

from __future__ import annotations

from ..errors import DeadlineExceeded, ForetokenError, InvalidRequest
from ..interface.output import Refusal, RequestOutput, TokenLogprob
from ..interface.plan import ScheduledRequest
from ..interface.request import Delta, FinishReason, Request, RequestStatus
from ..interface.sampling import SamplingMetadata


def take_output(request: Request, scheduled: ScheduledRequest, out: RequestOutput) -> Delta:
    """Append a step's tokens to the request, and return them as a delta for its consumer.

    Raises any error of the request's ``on_token``.
    """
    delta, tokens, token_ids = Delta(), request.tokens, out.token_ids
    if out.prompt_logprobs:
        delta.prompt_logprobs = _new_prompt_logprobs(request, scheduled, out)
    num_computed = scheduled.stop + len(out.path)
    cannot_end = (
        request.on_token is None
        and len(tokens) + len(token_ids) < request.max_len
        and request.stop_ids.isdisjoint(token_ids)
    )
    if cannot_end:
        tokens.extend(token_ids)
        delta.token_ids, delta.logprobs = [*token_ids], [*out.logprobs]
    else:
        _append(request, out, delta)
        num_computed = min(num_computed, len(tokens))
    request.num_computed = num_computed
    if out.pooled is not None:
        delta.pooled = out.pooled
        request.usage.verify_steps += 1
        if request.num_pending == 0:
            delta.finish_reason = FinishReason.STOP
    return delta


def request_error(request: Request, out: RequestOutput) -> ForetokenError:
    """Return the error of a request that failed alone, while its step succeeded.

    If a parameter of the request caused the failure, the error names the parameter.
    """
    if not isinstance(out.error, Refusal):
        return ForetokenError(out.error)
    return InvalidRequest(str(out.error), param=_param_to_blame(request.sampling))


def _param_to_blame(sampling: SamplingMetadata) -> str | None:
    """Return the name of a parameter that bans tokens, for the error that all are banned."""
    if sampling.constraint_param is not None:
        return sampling.constraint_param
    if sampling.params.allowed_token_ids is not None:
        return "allowed_token_ids"
    if sampling.bad_words_ids:
        return "bad_words"
    return "min_tokens" if sampling.params.min_tokens else None


def late_end(request: Request) -> Delta:
    """Return the last delta of a request whose deadline passed: an error if it never ran."""
    if request.status is RequestStatus.WAITING and not request.num_output:
        return Delta(error=DeadlineExceeded("the deadline passed before the request could run"))
    return Delta(finish_reason=FinishReason.ABORT, stop_reason="deadline")


def _append(request: Request, out: RequestOutput, delta: Delta) -> None:
    """Append tokens one by one, up to the one that ends the answer, if any."""
    if out.token_ids and not request.sampling.generates:
        delta.finish_reason = FinishReason.LENGTH
        return
    for index, token_id in enumerate(out.token_ids):
        request.tokens.append(token_id)
        delta.token_ids.append(token_id)
        if out.logprobs:
            delta.logprobs.append(out.logprobs[index])
        end = end_at(request, token_id, is_full=len(request.tokens) >= request.max_len)
        if end is not None:
            delta.finish_reason, delta.stop_reason = end
            return


def end_at(
    request: Request, token_id: int, *, is_full: bool
) -> tuple[FinishReason, int | str | None] | None:
    """Return the finish reason and the stop reason if ``token_id`` ends the answer, else None.

    ``is_full``: whether the answer has reached its maximum length with this token. A stop token or
    stop string takes precedence over that limit. The request's ``on_token`` reads the token.
    """
    if token_id in request.stop_ids:
        explicit = token_id in request.sampling.params.stop_token_ids
        return FinishReason.STOP, token_id if explicit else None
    stop = request.on_token(token_id) if request.on_token is not None else None
    if stop is not None:
        return FinishReason.STOP, stop
    return (FinishReason.LENGTH, None) if is_full else None


def _new_prompt_logprobs(
    request: Request, scheduled: ScheduledRequest, out: RequestOutput
) -> list[TokenLogprob]:
    """Return the prompt log-probabilities that were not sent yet.

    A request that was preempted computes all of them again.
    """
    new = list(out.prompt_logprobs[max(0, request.num_prompt_logprobs - scheduled.start) :])
    request.num_prompt_logprobs += len(new)
    return new
