-- Returns the account that a text names by its id or its name, or account:user for an invited user's name; '' when
-- there is none. With `within`, whoever does not belong to that account is not found either.
local function account_id_of(id_or_name, within)
  local found = id_or_name
  if redis.call('EXISTS', K('account:' .. found)) == 0 then found = redis.call('GET', K('name:' .. found)) or '' end
  if within and within ~= '' and string.match(found, '^[^:]*') ~= within then return '' end
  return found
end
