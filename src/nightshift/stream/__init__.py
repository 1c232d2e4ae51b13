"""Sends episodes from actors to a learner, each stored exactly once, and the latest weights back to the actors.

    actor                                                learner
    ─────                                                ───────
    Spool.put(episode) ─▶ disk                           LearnerEndpoint: Inbox + WeightPublisher
              │ oldest first                               │
              ▼                                            ▼
           Sender ── Link.send(messages) ──────────────▶ Inbox.receive ─▶ disk: one rename commits the episode,
              │                                            │              its ID, its position and its checksum
              │◀──────────── acks ─────────────────────────┘
              │   accepted or duplicate: deleted from the spool; rejected: moved to rejected/ with the reason;
              │   deferred: sent again later
              │
              └── Link.weights(newer_than) ─────────────▶ WeightPublisher.latest
                        ◀── newer weights, or None ────────┘

An episode stays in the spool until its ack has arrived, and it is in the inbox before its ack is sent. If either
process is killed, the episode is therefore in the spool, in the inbox or in both; the inbox holds it at most once,
because its file name contains its episode ID.

Backpressure: the learner defers episodes while its rate limiter does not admit those that have arrived, and `put`
blocks while the spool is full. The learner never blocks on an actor, and weights reach an actor that waits.
Links: in one process (`link`), between processes of a Ray cluster (`ray_link`), over TCP (`tcp_link`, `server`).
"""
