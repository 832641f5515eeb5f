-- How many bytes an account's uploaded images take: counted by the day on which they expire, so that those of a day
-- that is over stop counting by themselves, up to a day after their images are gone.
local DAY = 24 * 60 * 60 * 1000

local function count_uploaded(account, day, bytes)
  local name = K('uploaded:' .. account)
  if redis.call('HINCRBY', name, day, bytes) <= 0 then redis.call('HDEL', name, day) end
end

local function bytes_uploaded(account)
  local rows, today, bytes = redis.call('HGETALL', K('uploaded:' .. account)), math.floor(now / DAY), 0
  for place = 1, #rows, 2 do
    if tonumber(rows[place]) >= today then
      bytes = bytes + tonumber(rows[place + 1])
    else
      redis.call('HDEL', K('uploaded:' .. account), rows[place])
    end
  end
  return bytes
end
