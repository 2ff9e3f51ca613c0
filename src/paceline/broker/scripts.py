"""The server-side scripts: what must happen at once, or not be seen half done."""

from __future__ import annotations

# KEYS: the blobs' keys, one stream per message, and the stream to acknowledge in, if any. ARGV: the numbers of blobs and of
# messages, the blobs' values, payload and traceparent of each message, the group and the entry ids to acknowledge.
# A script that fails stops where it is: blobs come first, so no message can be there without them, and the
# acknowledgement comes last.
APPEND = """
local blobs, messages = tonumber(ARGV[1]), tonumber(ARGV[2])
for i = 1, blobs do
  redis.call('SET', KEYS[i], ARGV[2 + i])
end
local ids = {}
local at = 3 + blobs
for i = 1, messages do
  local payload, trace = ARGV[at], ARGV[at + 1]
  if trace == '' then
    ids[i] = redis.call('XADD', KEYS[blobs + i], '*', 'p', payload)
  else
    ids[i] = redis.call('XADD', KEYS[blobs + i], '*', 'p', payload, 't', trace)
  end
  at = at + 2
end
for i = at + 1, #ARGV do
  redis.call('XACK', KEYS[#KEYS], ARGV[at], ARGV[i])
end
return ids
"""

# KEYS: the stream. ARGV: group, consumer, idle milliseconds to set, entry ids. Returns the ids that the consumer holds.
# XCLAIM alone would take back what another consumer has reclaimed in the meantime, and the two would rob each other.
TOUCH = """
local held = {}
for i = 4, #ARGV do
  local row = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])
  if #row == 1 then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'IDLE', ARGV[3], 'JUSTID')
    held[#held + 1] = ARGV[i]
  end
end
return held
"""
