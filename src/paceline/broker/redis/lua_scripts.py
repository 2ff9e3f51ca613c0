"""Lua scripts for operations that the server must do atomically."""

from __future__ import annotations

# KEYS: one stream per message, then the stream to acknowledge in, if any. ARGV: the number of messages,
# payload and traceparent of each message, then the group and ids to acknowledge. Blobs are not among the
# arguments, because a script would copy each twice and hash all of its bytes: they are stored in the same
# transaction. A script that fails stops and undoes nothing, so everything that can fail is checked first; a
# full server refuses the first write or none. The acknowledgement is last: it needs no memory. It also
# removes what SAVE_PROGRESS has saved.
APPEND = """
local messages = tonumber(ARGV[1])
for i = 1, #KEYS do
  local kind = KEYS[i] == KEYS[i - 1] and 'stream' or redis.call('TYPE', KEYS[i]).ok
  if kind ~= 'stream' and kind ~= 'none' then
    return redis.error_reply('WRONGTYPE ' .. KEYS[i] .. ' is a ' .. kind .. ', not a stream')
  end
end
local ids = {}
local at = 2
for i = 1, messages do
  local payload, trace = ARGV[at], ARGV[at + 1]
  if trace == '' then
    ids[i] = redis.call('XADD', KEYS[i], '*', 'p', payload)
  else
    ids[i] = redis.call('XADD', KEYS[i], '*', 'p', payload, 't', trace)
  end
  at = at + 2
end
for first = at + 1, #ARGV, 1000 do
  local saved = {}
  for i = first, math.min(first + 999, #ARGV) do
    saved[#saved + 1] = KEYS[#KEYS] .. ':' .. ARGV[at] .. ':' .. ARGV[i]
  end
  redis.call('XACK', KEYS[#KEYS], ARGV[at], unpack(ARGV, first, first + #saved - 1))
  redis.call('UNLINK', unpack(saved))
end
return ids
"""

# KEYS: the stream. ARGV: group, consumer, then entry id, offset and bytes of each part. Returns the ids of
# the parts that were saved, each in STREAM:GROUP:ID. Unlike an append, a repeated part changes nothing.
SAVE_PROGRESS = """
local saved = {}
for i = 3, #ARGV, 3 do
  local key, offset = KEYS[1] .. ':' .. ARGV[1] .. ':' .. ARGV[i], tonumber(ARGV[i + 1])
  local row = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])
  local length = redis.call('STRLEN', key)
  if #row == 1 and offset <= length then
    if offset > 0 and length <= offset + #ARGV[i + 2] then
      redis.call('SETRANGE', key, offset, ARGV[i + 2])
    else
      local before = offset > 0 and redis.call('GETRANGE', key, 0, offset - 1) or ''
      redis.call('SET', key, before .. ARGV[i + 2])
    end
    saved[#saved + 1] = ARGV[i]
  end
end
return saved
"""

# KEYS: streams. Removes them and the saved progress of their unacknowledged entries.
DELETE_STREAMS = """
for _, stream in ipairs(KEYS) do
  local groups = redis.call('EXISTS', stream) == 1 and redis.call('XINFO', 'GROUPS', stream) or {}
  for _, row in ipairs(groups) do
    local start = '-'
    while start do
      local rows, saved = redis.call('XPENDING', stream, row[2], start, '+', 1000), {}
      for i, pending in ipairs(rows) do
        saved[i] = stream .. ':' .. row[2] .. ':' .. pending[1]
      end
      start = rows[1] and '(' .. rows[#rows][1]
      if start then
        redis.call('UNLINK', unpack(saved))
      end
    end
  end
  redis.call('UNLINK', stream)
end
"""

# KEYS: the stream. ARGV: group, consumer, idle milliseconds to set, entry ids. Returns the consumer's own
# ids. XCLAIM without the check would take back entries that another consumer has reclaimed in the meantime.
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

# KEYS: the stream. ARGV: group, consumer, minimum idle milliseconds, maximum entries. Returns id, fields and
# number of deliveries of each entry. The server looks for idle entries itself (XPENDING with IDLE), so this
# is one round trip however many are pending. XCLAIM leaves out entries that were removed from the stream
# (Redis 7) or returns nil for them (6.2): they are acknowledged, since nobody can ever answer them.
RECLAIM = """
local result, start, left = {}, '-', tonumber(ARGV[4])
while left > 0 do
  local rows = redis.call(
    'XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[3], start, '+', math.min(left, 1000))
  if #rows == 0 then
    break
  end
  local ids, present = {}, {}
  for i, row in ipairs(rows) do
    ids[i] = row[1]
  end
  local claimed = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, unpack(ids))
  for i = 1, #claimed do
    if claimed[i] and claimed[i][2] then
      present[claimed[i][1]] = claimed[i][2]
    end
  end
  for _, row in ipairs(rows) do
    if present[row[1]] then
      result[#result + 1] = {row[1], present[row[1]], row[4] + 1}
      left = left - 1
    else
      redis.call('XACK', KEYS[1], ARGV[1], row[1])
      redis.call('UNLINK', KEYS[1] .. ':' .. ARGV[1] .. ':' .. row[1])
    end
  end
  start = '(' .. ids[#ids]
end
return result
"""

# KEYS: the stream. Removes the entries before the first one that some group has not processed (the group's
# first pending entry, or the one after its position). Returns how many.
TRIM = """
local floor_ms, floor_number
local function keep_from(id, offset)
  local ms, number = id:match('^(%d+)-(%d+)$')
  ms, number = tonumber(ms), tonumber(number) + offset
  if not floor_ms or ms < floor_ms or (ms == floor_ms and number < floor_number) then
    floor_ms, floor_number = ms, number
  end
end
for _, row in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = {}
  for i = 1, #row, 2 do
    group[row[i]] = row[i + 1]
  end
  keep_from(group['last-delivered-id'], 1)
  if group.pending > 0 then
    keep_from(redis.call('XPENDING', KEYS[1], group.name)[2], 0)
  end
end
if not floor_ms then
  return 0
end
return redis.call('XTRIM', KEYS[1], 'MINID', '=', string.format('%.0f-%.0f', floor_ms, floor_number))
"""

# KEYS: the stream. ARGV: the group. Whether the group has acknowledged every entry; 1 or 0.
ALL_DONE = """
local taken
for _, row in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = {}
  for i = 1, #row, 2 do
    group[row[i]] = row[i + 1]
  end
  if group.name == ARGV[1] then
    if group.pending > 0 then
      return 0
    end
    taken = group['last-delivered-id']
  end
end
local after = taken and redis.call('XREAD', 'COUNT', 1, 'STREAMS', KEYS[1], taken)
if taken and not after then
  return 1
end
return redis.call('XLEN', KEYS[1]) == 0 and 1 or 0
"""
