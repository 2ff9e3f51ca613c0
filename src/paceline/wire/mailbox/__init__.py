"""Encodes the mailboxes' messages as msgpack, and the blobs that they name."""
