"""Lua scripts for what the server must do in one step, so that nobody sees it half done."""

from __future__ import annotations

# KEYS: the blobs' keys, then one stream per message. ARGV: the numbers of blobs and of messages, the blobs'
# values, then payload and traceparent of each message. Blobs come first because a script that fails stops
# where it is: no message is stored without its blobs.
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
return ids
"""

# KEYS: the stream. ARGV: group, consumer, idle milliseconds to set, entry ids. Returns the consumer's own
# ids. XCLAIM alone would take entries back that another consumer has reclaimed in the meantime.
TOUCH = """
local own = {}
for i = 4, #ARGV do
  local row = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])
  if #row == 1 then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'IDLE', ARGV[3], 'JUSTID')
    own[#own + 1] = ARGV[i]
  end
end
return own
"""
