"""The message broker: mailboxes with acknowledgement, and blobs, on Redis behind a Protocol."""

from paceline.broker.backpressure import append_when_room
from paceline.broker.base import Ack, Broker, Entry, Outgoing
from paceline.broker.mailbox import Mailbox
from paceline.broker.opening import open_broker

__all__ = ["Ack", "Broker", "Entry", "Mailbox", "Outgoing", "append_when_room", "open_broker"]
