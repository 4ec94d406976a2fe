"""All mutations, in the order of the layers."""

from __future__ import annotations

from .lists import (
    commit,
    deciding,
    draft_model,
    forms,
    kernels,
    leases,
    model,
    owners,
    pins,
    processors,
    quotas,
    routes,
    rows,
    scheduling,
    serving,
    sources,
    texts,
    tree,
    verifying,
    waiting,
)

MUTATIONS = (
    *tree.MUTATIONS,
    *leases.MUTATIONS,
    *quotas.MUTATIONS,
    *pins.MUTATIONS,
    *commit.MUTATIONS,
    *verifying.MUTATIONS,
    *processors.MUTATIONS,
    *rows.MUTATIONS,
    *scheduling.MUTATIONS,
    *serving.MUTATIONS,
    *model.MUTATIONS,
    *kernels.MUTATIONS,
    *sources.MUTATIONS,
    *deciding.MUTATIONS,
    *draft_model.MUTATIONS,
    *texts.MUTATIONS,
    *routes.MUTATIONS,
    *owners.MUTATIONS,
    *waiting.MUTATIONS,
    *forms.MUTATIONS,
)
