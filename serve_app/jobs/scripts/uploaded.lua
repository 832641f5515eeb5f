-- How many bytes an account's uploaded images take. They count until they are removed; those that the version before
-- added, until the day on which they expire is over.
local DAY = 24 * 60 * 60 * 1000
local UNTIL_REMOVED = 99999999 -- this day stands for no expiry: the version before reads it as one that is to come

local function count_uploaded(account, day, bytes)
  local name = K('uploaded:' .. account)
  if redis.call('HINCRBY', name, day, bytes) <= 0 then redis.call('HDEL', name, day) end
  redis.call('PERSIST', name)
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

local function upload_of(account, sha256) return K('upload_of:' .. account .. ':' .. sha256) end

-- Let an uploaded image be listed and found by its digest. `due`: when (ms) to look whether its time is over.
local function index_upload(image_id, account, sha256, created, due)
  redis.call('SET', upload_of(account, sha256), image_id)
  redis.call('ZADD', K('uploads:' .. account), created, image_id)
  redis.call('ZADD', K('uploads_due'), due, image_id)
end
