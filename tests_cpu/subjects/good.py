"""A subject of one's own, as the README shows it."""

import muonsplit


@muonsplit.subject(dialect="moonlight", recognises=False)
def build(model, layouts):  # type: ignore[no-untyped-def]
    return muonsplit.PerHeadMuon(
        model.named_parameters(), layouts, dialect="moonlight", lr=0.01, weight_decay=0.05
    )
