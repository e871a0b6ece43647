// The words in which loaded libraries have the addresses of functions of other libraries, on Linux: those of the BLAS
// (blas_entries.cpp) and others (blas_others.cpp) get the addresses of ours.
#include "blas.hpp"
#if defined(__linux__)
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

namespace lp::blas {
namespace {

struct Library {
    ElfW(Addr) base;
    const ElfW(Phdr) * headers;
    int header_count;
    char* name;
};
pthread_mutex_t words_lock = PTHREAD_MUTEX_INITIALIZER;  // held while words are listed or written, and in forks
bool is_installed;
unsigned long long searched_loads;

// Writes a word of a table that may be read-only.
void write_word(const Library& library, std::atomic<void*>* word, void* value) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t at = (uintptr_t)word;
    int protection = 0;
    for (int i = 0; i < library.header_count; i++) {
        const ElfW(Phdr) & part = library.headers[i];
        const uintptr_t begin = library.base + part.p_vaddr;
        const bool holds = at >= begin && at < begin + part.p_memsz;
        if (holds && part.p_type == PT_LOAD && part.p_flags & PF_W) protection |= PROT_READ | PROT_WRITE;
        if (part.p_type == PT_GNU_RELRO && holds && at < ((begin + part.p_memsz) & -page)) protection |= PROT_EXEC;
    }
    const bool is_relocated = protection & PROT_EXEC;  // and read-only since
    if (!(protection & PROT_WRITE)) return;
    void* start = (void*)(at & -page);
    if (is_relocated && mprotect(start, page, PROT_READ | PROT_WRITE)) return;
    word->store(value);
    if (is_relocated) mprotect(start, page, PROT_READ);
}

#if defined(__x86_64__)
const uint32_t WORD_TYPES[] = {R_X86_64_JUMP_SLOT, R_X86_64_GLOB_DAT, R_X86_64_64};
#else
const uint32_t WORD_TYPES[] = {R_AARCH64_JUMP_SLOT, R_AARCH64_GLOB_DAT, R_AARCH64_ABS64};
#endif

// The function to which a symbol is bound: a lazy stub, which is in the library itself, would overwrite our word.
void* bound(const Library& library, void* handle, const char* name, void* now) {
    for (int i = 0; i < library.header_count; i++) {
        const ElfW(Phdr) & part = library.headers[i];
        if (part.p_type != PT_LOAD || (uintptr_t)now - (library.base + part.p_vaddr) >= part.p_memsz) continue;
        void* found = dlsym(RTLD_DEFAULT, name);
        return found ? found : dlsym(handle, name);
    }
    return now;
}

// The words of each library that was searched, which is searched once.
struct Named {
    std::atomic<void*>* word;
    const char* name;
};
struct Searched {
    uint64_t key;  // of its name, its address and its entry in the loader's list
    int first, size;
};
template <class T> struct List {
    T* at;
    int size, capacity;
    bool add(const T& x) {
        if (size == capacity) {
            const int grown = capacity ? 2 * capacity : 256;
            void* moved = realloc(at, (size_t)grown * sizeof(T));
            if (!moved) return false;
            at = (T*)moved;
            capacity = grown;
        }
        at[size++] = x;  // NOLINT(clang-analyzer-security.ArrayBound): `size` is never negative
        return true;
    }
};
List<Named> named;
List<Searched> searched;

void add_words(const Library& library) {
    const ElfW(Dyn)* entry = nullptr;
    for (int i = 0; i < library.header_count; i++) {
        const ElfW(Phdr) & part = library.headers[i];
        if (part.p_type == PT_DYNAMIC) entry = (const ElfW(Dyn)*)(library.base + part.p_vaddr);
    }
    uintptr_t at[DT_NUM] = {};
    for (; entry && entry->d_tag != DT_NULL; entry++)
        if (entry->d_tag > 0 && entry->d_tag < DT_NUM) at[entry->d_tag] = entry->d_un.d_val;
    for (int tag : {DT_SYMTAB, DT_STRTAB, DT_JMPREL, DT_RELA})  // glibc has relocated these, musl has not
        if (at[tag] && at[tag] < library.base) at[tag] += library.base;
    const auto* symbols = (const ElfW(Sym)*)at[DT_SYMTAB];
    const char* strings = (const char*)at[DT_STRTAB];
    if (!symbols || !strings) return;
    for (int table = 0; table < 2; table++) {
        const auto* relocations = (const ElfW(Rela)*)at[table ? DT_RELA : DT_JMPREL];
        const size_t size = relocations ? at[table ? DT_RELASZ : DT_PLTRELSZ] / sizeof *relocations : 0;
        for (size_t i = 0; i < size; i++) {
            const uint32_t type = ELF64_R_TYPE(relocations[i].r_info);
            const bool is_word = type == WORD_TYPES[0] || type == WORD_TYPES[1] || type == WORD_TYPES[2];
            const char* name = strings + symbols[ELF64_R_SYM(relocations[i].r_info)].st_name;
            if (is_word && !relocations[i].r_addend && is_replaced(name))
                named.add({(std::atomic<void*>*)(library.base + relocations[i].r_offset), name});
        }
    }
}

void search(const Library& library, void* handle, const link_map* map, bool back) {
    uint64_t key = mixed(mixed(1, (int64_t)library.base), (int64_t)(uintptr_t)map);
    for (const char* c = library.name; *c; c++) key = mixed(key, *c);
    pthread_mutex_lock(&words_lock);
    Searched found = {key, named.size, -1};
    for (int i = 0; i < searched.size; i++)
        if (searched.at[i].key == key) found = searched.at[i];
    if (found.size < 0) {
        add_words(library);
        found.size = named.size - found.first;
        searched.add(found);
    }
    for (int i = found.first; i < found.first + found.size; i++) {
        const Named each = named.at[i];
        pthread_mutex_unlock(&words_lock);  // not held in calls of the loader
        void* now = each.word->load();
        if (!back && now) now = bound(library, handle, each.name, now);
        pthread_mutex_lock(&words_lock);
        void* other = now ? exchanged(each.name, now, back) : nullptr;
        if (other) write_word(library, each.word, other);
    }
    pthread_mutex_unlock(&words_lock);
}

struct Libraries {
    List<Library> list;
    bool is_wanted;
    unsigned long long loads;  // since the start of the process
};

// Nothing is called here that takes the loader's locks.
int add_library(dl_phdr_info* info, size_t, void* to) {
    Libraries& all = *(Libraries*)to;
    all.loads = info->dlpi_adds;
    if (!all.is_wanted) return 1;
    const Library found = {info->dlpi_addr, info->dlpi_phdr, info->dlpi_phnum, strdup(info->dlpi_name)};
    if (all.list.add(found)) return 0;
    free(found.name);
    return 1;
}

// The lock keeps a fork from happening meanwhile: the child's loader would be locked.
void list_libraries(Libraries& all) {
    pthread_mutex_lock(&words_lock);
    dl_iterate_phdr(add_library, &all);
    pthread_mutex_unlock(&words_lock);
}

void search_all(bool back) {
    Libraries all = {{}, true, 0};
    Dl_info ours = {};
    dladdr((void*)search_all, &ours);
    list_libraries(all);
    for (int i = 0; i < all.list.size; i++) {
        const Library& each = all.list.at[i];
        // Held, so that it is not unloaded; another one may be there by now. The program, the first in the list, has no
        // name in glibc, and in musl one under which it is not found.
        void* handle = each.name ? dlopen(i ? each.name : nullptr, RTLD_LAZY | RTLD_NOLOAD) : nullptr;
        link_map* map = nullptr;
        if (handle && !dlinfo(handle, RTLD_DI_LINKMAP, (void*)&map) && map->l_addr == each.base &&
            (void*)each.base != ours.dli_fbase)
            search(each, handle, map, back);
        if (handle) dlclose(handle);
        free(each.name);
    }
    free(all.list.at);
    searched_loads = all.loads;
}

}  // namespace

void search_new_libraries() {
    Libraries none = {};
    list_libraries(none);
    if (is_installed && none.loads != searched_loads) search_all(false);
}

namespace {

__attribute__((constructor)) void protect_forks() {
    pthread_atfork([] { pthread_mutex_lock(&words_lock); }, [] { pthread_mutex_unlock(&words_lock); },
                   [] { pthread_mutex_unlock(&words_lock); });
}

}  // namespace

}  // namespace lp::blas

using namespace lp::blas;

LP_API void lp_blas_install(int32_t is_on) {
    Libraries none = {};
    list_libraries(none);
    if (is_on && is_installed && none.loads == searched_loads) return;
    is_installed = is_on;
    search_all(!is_on);
}
#endif
