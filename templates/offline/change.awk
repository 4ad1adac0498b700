# The sentence that changes one line: asked="change Bo's points to 5" awk -f change.awk a.csv notes.txt
# → change "Bo,16,1" to "Bo,16,5" in a.csv. The line is the one with most words of the wish. In a table, the
# column is one that the wish names; else a text like the new one is replaced: 7:15 by 7:30.
BEGIN {
    asked = ENVIRON["asked"]
    value = " " asked
    sub(/ instead of .*/, "", value)
    sub(/[.!? ]*( instead| please| pls)?[.!? ]*$/, "", value)
    if (!sub(/.* (to|as|into|at|be|now) /, "", value)) sub(/.* (make|set|change) .* /, "", value)  # make the tea 1.80
    sub(/,? (for|in|of|at|per|and|then|instead|please|pls|can|could) .*|,.*/, "", value)
    said = " " tolower(asked) " "
    at = index(said, tolower(value))
    if (at) said = substr(said, 1, at - 1) substr(said, at + length(value))
    gsub(/[^a-z0-9]+/, " ", said)
    alike = value
    gsub(/[^0-9A-Za-z ]/, ".", alike)
    gsub(/[0-9]+/, "[0-9]+", alike)
    alone = "(^|[^0-9:.])" alike "($|[^0-9:.])"
}
function is_said(word) {
    return length(word) > 1 && word !~ /^(the|and|for|has|was|to|is|in|of|at|on|no)$/ && (said ~ " " word "(s|es)? " || length(word) > 4 && index(said, " " substr(word, 1, length(word) - 1) " "))
}
{ sub(/\r$/, "") }
FNR == 1 { columns = FILENAME ~ /\.csv$/ ? split(tolower($0), head, /[,;]/) : 0 }
/"/ || FNR == 1 && columns { next }
{
    hits = 0
    for (w = split(tolower($0), word, /[^a-z0-9]+/); w; w--) hits += is_said(word[w])
    cells = split($0, cell, /[,;]/)
    if (!hits || hits < most) next
    changed = ""
    for (i = 1; i <= columns && cells == columns; i++) {
        named = 0
        for (w = split(head[i], word, /[^a-z0-9]+/); w; w--) named += is_said(word[w])
        if (!named || cell[i] == value) continue
        comma = index($0, ";") ? ";" : ","
        changed = ""
        for (c = 1; c <= cells; c++) changed = changed (c > 1 ? comma : "") (c == i ? value : cell[c])
    }
    if (!changed && value ~ /[0-9]/ && match($0, alone)) {
        before = substr($0, 1, RSTART - 1)
        rest = substr($0, RSTART)
        match(rest, alike)
        before = before substr(rest, 1, RSTART - 1)
        rest = substr(rest, RSTART + RLENGTH)
        if (rest !~ alone) changed = before value rest
    }
    if (!changed || changed == $0) next
    sentence = hits > most ? "change \"" $0 "\" to \"" changed "\" in " FILENAME : ""
    most = hits
}
END {
    sub(/ in \.\//, " in ", sentence)
    if (sentence) print sentence
    exit !sentence
}
