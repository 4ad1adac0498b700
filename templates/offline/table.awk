# The figures of the columns that a question names: asked="who is best in maths" awk -f table.awk a.csv
# → a.csv, maths: highest 95 (Greta), lowest 45 (Finn), average 74.2857, sum 520 of 7 rows
# A cell that the question names, too, chooses the rows: "average grade in math" → a.csv, grade, math: …
BEGIN {
    asked = " " tolower(ENVIRON["asked"]) " "
    gsub(/ then /, " than ", asked)
    if (match(asked, /(under|below|less than|fewer than|over|above|more than) -?[0-9.]+/)) limit = substr(asked, RSTART, RLENGTH)
    bound = limit
    wanted = ENVIRON["answer"]  # the cells that are listed: yes or no
    sub(/.* /, "", bound)  # under 60 → 60
    said = asked
    gsub(/[][ \t.,;:!?"'()]+/, " ", said)
}
function is_named(column) {  # `grades` in a question also names the column grade
    column = tolower(column)
    gsub(/[^a-z0-9]+/, ".", column)
    sub(/s$/, "", column)
    if (asked ~ /spen[dt]|paid|pay|cost|expensive|cheap|dear/ && column ~ /^(amount|price|cost|euro|sum|total|spent|paid)s?(\.|$)/) return 1
    if (asked ~ /[^a-z]money[^a-z]/ && !wanted && column ~ /(euro|price|amount|cost|fee|paid|eur|dollars?)$/) return 1
    if (asked ~ "[^a-z0-9]" column "s?[^a-z0-9]") return 1
    if (asked ~ /fastest|slowest/ && column ~ /^(time|seconds?|sec)/) return 1
    if (asked ~ /longest|shortest/ && column ~ /^(distance|length|duration|minutes|km)/) return 1
    if (asked ~ /oldest|youngest/ && column ~ /^(age|born|birth)/) return 1
    if (asked ~ /heaviest|lightest/ && column ~ /^(weight|mass|kg)/) return 1
    if (asked ~ /hottest|coldest|warmest/ && column ~ /temp/) return 1
    parts = split(column, part, ".")  # `rain` names rain_mm, if no column is called rain
    for (p = 1; p <= parts; p++) if (length(part[p]) > 2 && asked ~ "[^a-z0-9]" part[p] "s?[^a-z0-9]") return asked ~ "(average|highest|lowest|best|total|mean) " part[p] ? 1.5 : 0.5
}
function is_said(text) {  # `forward` and `forwards`, but no number and nothing as short as `in`
    text = tolower(text)
    return (length(text) > 2 || text ~ /^[a-z][0-9]$/) && text !~ /^[0-9.]+$/ && (index(said, " " text " ") || index(said, " " text "s "))
}
function has_said(text) {  # school atlas, if `atlases` is said
    for (w = split(tolower(text), word, /[^a-z]+/); w; w--)
        if (length(word[w]) > 3 && word[w] != "money" && (index(said, " " word[w] " ") || index(said, " " word[w] "s ") || index(said, " " word[w] "es "))) return 1
}
function is_quoted(key) {  # a comma in quotes would shift the columns: such a file is left out
    sub(/, .*/, "", key)
    return key in quoted
}
function count(key, name, value, points) {
    if (!rows[key]++) {
        keys[++known] = key
        score[key] = points
        if (points > best) best = points
    }
    sum[key] += value
    if (rows[key] == 1 || value > high[key]) { high[key] = value; highest[key] = top[key] = "" }
    if (rows[key] == 1 || value < low[key]) { low[key] = value; lowest[key] = bottom[key] = "" }
    if (value == high[key]) top[key] = top[key] "\nhighest: " $0
    if (value == low[key]) bottom[key] = bottom[key] "\nlowest: " $0
    if (value == high[key] && length(highest[key]) < 200) highest[key] = highest[key] ", " name
    if (value == low[key] && length(lowest[key]) < 200) lowest[key] = lowest[key] ", " name
    if (limit ~ /^[ubfl]/ ? value < bound + 0 : value > bound + 0) found[key] = found[key] "\n" name ": " value
}
{ sub(/\r$/, "") }
/"/ { quoted[FILENAME] }
FNR == 1 {
    comma = /;/ ? ";" : ","  # German spreadsheets write Anna;1,5
    split($0, head, comma)
    heads = " " tolower($0) " "  # `rain` means the column rain_mm, not the rows with `rain`
    gsub(/[^a-z0-9]+/, " ", heads)
    split("", named)
    money = 0  # the column with money: price, rather than an amount
    title = FILENAME
    gsub(/.*\/|\.[^.]*$/, "", title)
    files++
    who = 0  # which meal sold the most: the column `meal` answers, else the first
    for (i in head) {
        named[i] = tolower(head[i])
        gsub(/[^a-z0-9]+/, ".", named[i])
        if (named[i] ~ /(price|cost|euro|eur|fee|money|dollar)s?$/ || !money && named[i] ~ /amount$/) money = i
        if (said ~ "(which|what|whose|wich) " named[i] "s? ") who = i
        if (said ~ / (day|when|date) / && tolower(head[i]) ~ /^(day|date)/) who = i
        if (said ~ / who / && named[i] ~ /^(name|who|person|borrower|customer|member|pupil|student|player|seller)s?$/) who = i
    }
    next
}
{
    cells = split($0, cell, comma)
    for (i = 1; i <= cells; i++) if (cell[i] ~ /^ *-?[0-9]+,[0-9]+ *$/) sub(/,/, ".", cell[i])  # 1,5
    if (said ~ "(what " named[who] "| who) " && tolower(cell[who]) ~ /^ *([0-9.]+|yes|no) *$/) who = 0  # what sold most
    for (i = 1; !who && i <= cells; i++) if (cell[i] !~ /^ *[0-9.\/-]+ *$/) who = i  # the first that is no number and no date
    if (!who) who = 1
    chosen = partly = 0  # the place of the cell that the question names, or has a word of
    for (i = 1; i <= cells && !limit; i++) {
        if (is_said(cell[i]) && !index(heads, " " tolower(cell[i]) " ") || index(said, " " tolower(head[i] " " cell[i]) " ")) chosen = i
        if (has_said(cell[i])) partly = i
    }
    for (i = 1; i <= cells; i++) {
        key = FILENAME ", " head[i] " " wanted
        if (wanted && tolower(cell[i]) == wanted && is_named(head[i]) && !(FILENAME in quoted)) {
            matching[key] = matching[key] ", " cell[who]
            matches[key]++
            if (money && cell[money] ~ /^ *[0-9.]+ *$/) { owed[key] = owed[key] + cell[money]; owing[key]++ }
        }
        if (cell[i] !~ /^ *-?[0-9]+(\.[0-9]+)? *$/ || tolower(head[i]) ~ /^(nr|no|id)\.?$/ || FILENAME in quoted) continue
        points = 2 * is_named(head[i]) + is_named(title)
        count(FILENAME ", " head[i], cell[who], cell[i] + 0, points)
        row = is_named(head[i]) && !chosen ? partly : chosen
        if (row && row != i && !(row == who && asked ~ /^ (and )?(who|which|wich) /)) count(FILENAME ", " head[i] ", " cell[row], cell[who], cell[i] + 0, points ? points + (chosen ? 4 : 3) + split(cell[row], word, " ") / 9 : 1)
    }
}
END {
    for (key in matching) {
        known_all = owing[key] == matches[key]  # no amount is missing
        if (is_quoted(key) || asked ~ / how much / && !known_all) continue
        print substr(key, 3) " (" matches[key] "): " substr(matching[key], 3) (known_all && asked ~ / how much |left / ? "; together " owed[key] : "")
        listed = 1
    }
    if (wanted) exit !listed
    spent = asked ~ /(spen[dt]|paid|pay|cost).* (on|for) / && asked !~ / in total/
    none = !known || !best && files > 1 || spent && best < 4
    if (none || asked ~ / of (them|those|these) /) exit 1  # some rows are meant, not the column
    if (!limit && asked ~ / (below|above|less than|more than|fewer than) /) exit 1  # than what?
    for (i = 1; i <= known; i++) {
        key = keys[i]
        if (is_quoted(key)) continue
        line = key ": highest " high[key] " (" substr(highest[key], 3) "), lowest " low[key] " (" substr(lowest[key], 3) "), average " sum[key] / rows[key] ", sum " sum[key] " of " rows[key] " rows"
        if (rows[key] == 1 && score[key] > 3) line = key ": " high[key]
        if (limit) line = key ", " limit ":" (found[key] ? found[key] : " none")
        gsub(/\.\//, "", line)
        # what is the most expensive, and whose is it?
        if (!limit && said ~ / (and|n) (who|what|which|when|where|how)/) line = line top[key] bottom[key]
        if (score[key] == best + 0) { print line; printed = 1 }
    }
    exit !printed
}
