"""The message broker: mailboxes with explicit acknowledgement, and blobs; Redis Streams or memory behind one Protocol."""
