-- args: since:number, after_ms:number, after_id, limit:number, most:number
-- page: a part of an index by time, newest first, which begins after a position (time and id).
-- A write takes the server at least 50 µs, so that an account has no more rows of one millisecond than this.
local SAME_MS = 32

-- Return {id, time} of at most `limit` rows that `is_wanted` takes, of `asked` from `latest` back to `since`; and {id,
-- time} of the last that was looked at, or {} when there are no more.
local function page(index, latest, asked, is_wanted)
  local rows = redis.call('ZREVRANGEBYSCORE', index, latest, since or '-inf', 'WITHSCORES', 'LIMIT', 0, asked)
  local found, last = {}, {}
  for i = 1, #rows, 2 do
    local id, ms = rows[i], tonumber(rows[i + 1])
    if not after_ms or ms < after_ms or (ms == after_ms and id < after_id) then
      if is_wanted(id) then found[#found + 1] = {id, rows[i + 1]} end
      if #found == limit then return found, {id, rows[i + 1]} end
    end
    last = {id, rows[i + 1]}
  end
  if #rows < 2 * asked then last = {} end
  return found, last
end
