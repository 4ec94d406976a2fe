"""Cohere's client over rerank, its newer API and the one before."""

from __future__ import annotations

from typing import Any

import cohere
from cohere.errors import BadRequestError, NotFoundError
from harness import KEY, RANKING, RANKING_URL, Features, check_ranking, expect, refused

# docs: begin
client = cohere.ClientV2(base_url=RANKING_URL, api_key=KEY)
client.rerank(model=RANKING, query="how long is a marathon?", documents=["42 kilometres."])
# docs: end
features = Features("cohere")


def rows(answer: Any) -> list[tuple[int, float, str | None]]:
    """Place, score and text of each result."""
    return [
        (each.index, each.relevance_score, getattr(getattr(each, "document", None), "text", None))
        for each in answer.results
    ]


@features.feature("rerank")
def rerank() -> None:
    check_ranking(
        lambda query, documents, top_n: rows(
            client.rerank(model=RANKING, query=query, documents=documents, top_n=top_n)
        )
    )


@features.feature("rerank of version 1")
def version_1() -> None:
    former = cohere.Client(base_url=RANKING_URL, api_key=KEY)

    def rank(query: str, documents: list[str], top_n: int) -> list[tuple[int, float, str | None]]:
        found = rows(
            former.rerank(
                model=RANKING, query=query, documents=documents, top_n=top_n, return_documents=True
            )
        )
        expect(all(text for _, _, text in found), True, "texts are there")
        return found

    check_ranking(rank)


@features.feature("async")
async def asynchronous() -> None:
    other = cohere.AsyncClientV2(base_url=RANKING_URL, api_key=KEY)
    answer = await other.rerank(model=RANKING, query="how long?", documents=["42 km.", "Bears."])
    expect(sorted(each.index for each in answer.results), [0, 1])


@features.feature("errors")
def errors() -> None:
    refused(NotFoundError, lambda: client.rerank(model="no", query="a", documents=["b"]))
    refused(BadRequestError, lambda: client.rerank(model=RANKING, query="a", documents=[]))


if __name__ == "__main__":
    features.run()
