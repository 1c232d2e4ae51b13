"""Episodes from actors to a learner, each stored exactly once; weights the other way, always the newest.

    actor                                                learner
    ─────                                                ───────
    Spool.put(episode) ─▶ disk                           Desk: Inbox + Publisher
              │ oldest first                               │
              ▼                                            ▼
           Courier ── Link.send(parcels) ──────────────▶ Inbox.receive ─▶ disk: one rename commits
              │                                            │              data, mark and order
              │◀──────────── receipts ─────────────────────┘
              │   accepted or duplicate: gone from the spool; rejected: set aside with the reason
              │
              └── Link.weights(newer_than) ─────────────▶ Publisher.newest
                        ◀── newer ones, or nothing ────────┘

An episode is in the spool until its receipt is there, and in the inbox before its receipt is sent. So whoever is
killed, it is in one of them or in both, and in the inbox at most once: its name there is its identity.

`put` waits for room in the spool, the courier for the learner, the learner for its disk; nobody waits for an actor.
Links: in this process (`link`), between processes of a Ray cluster (`on_ray`), between machines (`tcp`, `server`).
"""
