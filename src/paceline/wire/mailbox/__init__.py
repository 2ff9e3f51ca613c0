"""Messages of the mailboxes as msgpack, and the blobs that they name."""
